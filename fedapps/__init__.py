"""Second-order, scalar-only zeroth-order and personalised federated learning on Flower."""

__version__ = "0.1.0"
