"""What users import and type: the client, the `octrain` command and the local stack."""
