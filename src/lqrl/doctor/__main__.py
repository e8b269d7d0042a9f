"""``python -m lqrl.doctor`` is ``lqrl doctor``."""

import sys

from lqrl.doctor.command import main

sys.exit(main())
