"""`python -m moe_compiler`: the `moeflex` command."""

from __future__ import annotations

import sys

from moe_compiler.cli import main

sys.exit(main())
