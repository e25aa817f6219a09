"""What can be done with a checkpoint in one process, without the model that it is of."""
