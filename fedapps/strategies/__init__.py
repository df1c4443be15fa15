"""Flower strategies, one file a method. Importing them imports no torch."""

from fedapps.strategies.fedavg import FedAvg
from fedapps.strategies.fedpm import FedPM
from fedapps.strategies.localnewton import LocalNewton
from fedapps.strategies.options import RoundOptions

__all__ = ["FedAvg", "FedPM", "LocalNewton", "RoundOptions"]
