"""Training: the loop and what it is made of. Import its modules; this one imports nothing."""
