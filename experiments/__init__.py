"""experiments: a YAML file becomes arms, checked, timed, served and compared; and the `tk` command line."""
