"""vlmrun and the programs it is measured against: a module for each, and what they share."""
