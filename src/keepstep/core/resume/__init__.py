"""Which step all ranks can go back to: slots, the cut, the commit, the sources and the vote."""
