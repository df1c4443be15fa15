"""Engines: in-process, Flower's simulation, and a SuperLink that is there already; sweeps over them."""
