//! The `tollgate-shim` program.
fn main() {}
