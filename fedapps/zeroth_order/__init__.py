"""Zeroth-order, scalar-only methods: directions, rules, kernels, probes, journal and replica.

From the definition outwards: `philox`, `gaussian_table` and `directions` say what `u(seed, step, probe, element)` is;
`scheme` and `rules` what a round does to `(theta, state)`; `dispatch` does it fast; `probing` measures a client's
scalars; `aggregate`, `journal`, `replica` and `store` are what travels and what is kept. Flower is not known here.

Only `probing`, `perturbed`, `quiet` and `backend_triton` import torch; a server without it aggregates and keeps a journal.
"""
