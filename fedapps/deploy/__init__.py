"""A federation on real machines: its certificates, keys and start scripts, and what is wrong with them."""
