"""Parts of all sources that read a database's log: the form of events, their columns, and checks of common options."""
