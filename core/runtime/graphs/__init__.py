"""Steps that are captured once and replayed later: buckets, backends, verification."""
