from edgeshard_agent.entry import main

main()
