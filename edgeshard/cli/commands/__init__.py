"""The commands of edgectl, a file each."""
