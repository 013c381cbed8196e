"""Record traces of real generations, and replay them on a virtual clock under other policies, budgets and links."""
