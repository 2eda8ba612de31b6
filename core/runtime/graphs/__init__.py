"""Steps that are captured once and replayed after: buckets, backends, verification."""
