"""Which CPU libraries this build of the package has: a checkout's may have one alone."""

from __future__ import annotations

import pkg

# Empty where the package was compiled on import (PKG_JIT).
BUILT: list[str] = pkg._C.build_info()["cpu_levels"]
USABLE = [level for level in pkg._C.cpu_capabilities() if level in BUILT]
