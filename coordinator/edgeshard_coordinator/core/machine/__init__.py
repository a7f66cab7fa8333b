"""The state machine: one pure step for every event, and the actions that the state calls for."""
