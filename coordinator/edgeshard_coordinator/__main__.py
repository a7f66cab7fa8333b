from edgeshard_coordinator.entry import main

main()
