"""``python -m lqrl`` is the ``lqrl`` command."""

from lqrl.cli import main

main()
