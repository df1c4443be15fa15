"""Flower strategies, one file a method or family. Importing them imports no torch."""

from fedapps.settings import RoundSettings
from fedapps.strategies.base import RoundStrategy
from fedapps.strategies.ditto import Ditto
from fedapps.strategies.fedavg import FedAvg
from fedapps.strategies.fedavgm import FedAvgM
from fedapps.strategies.fedclup import FedCLUP
from fedapps.strategies.fednew import FedNew
from fedapps.strategies.fednl import FedNL
from fedapps.strategies.fedns import FedNS
from fedapps.strategies.fedopt import FedAdagrad, FedAdam, FedYogi
from fedapps.strategies.fedpm import FedPM
from fedapps.strategies.fedprox import FedProx
from fedapps.strategies.fedsophia import FedSophia
from fedapps.strategies.hiso import HiSo
from fedapps.strategies.localnewton import LocalNewton
from fedapps.strategies.localtrain import LocalTrain
from fedapps.strategies.ltda import LTDA
from fedapps.strategies.pfedme import PFedMe
from fedapps.strategies.psgd import PSGD
from fedapps.strategies.scaffold import SCAFFOLD

__all__ = [
    "LTDA",
    "PSGD",
    "SCAFFOLD",
    "Ditto",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCLUP",
    "FedNL",
    "FedNS",
    "FedNew",
    "FedPM",
    "FedProx",
    "FedSophia",
    "FedYogi",
    "HiSo",
    "LocalNewton",
    "LocalTrain",
    "PFedMe",
    "RoundSettings",
    "RoundStrategy",
]
