"""`python -m asyncckpt_worker`."""

import sys

from asyncckpt_worker.cli import main

sys.exit(main())
