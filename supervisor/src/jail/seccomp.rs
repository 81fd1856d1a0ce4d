//! The list of system calls, from its JSON text to the filters that the shim installs.
