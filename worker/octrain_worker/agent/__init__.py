"""The node agent: registers the node, says that it lives, and looks after its supervisors."""
