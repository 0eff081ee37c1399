"""`python -m stepprune_jax.generate`: see `stepprune_jax.generate.command`."""

import sys

from stepprune_jax.generate.command import main

if __name__ == "__main__":
    sys.exit(main())
