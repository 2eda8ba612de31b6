"""Several engines behind one address, on Ray Serve.

`plan` is read by every start; all else imports Ray, and is imported where there are replicas.
"""
