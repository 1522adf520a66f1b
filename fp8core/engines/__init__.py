"""Precision engines behind one protocol: which there are, which can run here, and how to make one."""
