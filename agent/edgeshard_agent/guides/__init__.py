"""What guided answers may say next: matchers of llguidance, in a process of their own."""
