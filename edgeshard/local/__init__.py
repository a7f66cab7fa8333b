"""Sites on this machine: daemons as child processes, for `edgectl serve`, the demo, the lab and
tests."""
