"""Messages and encrypted sockets shared by notebook, supervisor and ranks. No torch, no IPython."""
