"""A file per family of schemes. Each has a table SCHEMES, {spec class: Scheme}; every file here is
read, so a new one is registered by lying here."""
