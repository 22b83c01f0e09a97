"""Development only: servers and processes on this machine, stand-ins, demo, drills, soak, bench."""
