"""The `dsched` command. Each subcommand is a module of its own, imported when it is asked for."""
