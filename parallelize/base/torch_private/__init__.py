"""Every private name of torch that is used, each with the version that has it. No other room imports one."""
