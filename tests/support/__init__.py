"""What tests share: small models, worlds of fakes, apps on made-up engines, files to read."""
