"""Times in the demo: much shorter than in production, and long enough to watch."""

from __future__ import annotations

import os

PACE = float(os.environ.get("ONCEKEY_DEMO_PACE", "1"))
"""oncekey's own tests set it below 1, to run faster."""

LEASE_SECONDS = 3.0 * PACE
"""Short, so that you soon see the result of a crash. The default is 60 s, and 30 s in a worker."""
QUARANTINE_SECONDS = 5.0 * PACE
"""Short, for the same reason. The default is 5 minutes."""
LOOK_SECONDS = 1.0 * PACE
"""How often upkeep sweeps and reconciles."""
SLOW_SECONDS = 3.0 * PACE
"""How long ``?simulate=slow`` takes."""
