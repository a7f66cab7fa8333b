"""CP-SAT, which answers what planning asks about plans under rules, in a process of its own."""
