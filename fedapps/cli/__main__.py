"""``python -m fedapps.cli``."""

from fedapps.cli import main

main()
