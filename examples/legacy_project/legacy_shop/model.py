"""Model and data."""

import numpy as np
from torch import nn


def build_model() -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))


def customers(shop: int, year: int, num_customers: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Make the customers of a shop in a year: six features, and whether they came back."""
    random = np.random.default_rng([shop, year])
    features = random.normal(loc=0.5 * shop, size=(num_customers, 6)).astype(np.float32)
    returned = (features @ np.array([1.0, -2.0, 0.5, 0.0, 1.5, -1.0]) + 0.3 * random.normal(size=num_customers)) > 0
    return features, returned.astype(np.int64)
