"""``python -m smolbuild.cli``."""

from smolbuild.cli.main import main

main()
