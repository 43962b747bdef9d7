"""Commands that look at machines and hostfiles: ``rdmakit topo`` and ``rdmakit hostfile``."""
