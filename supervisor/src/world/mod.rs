//! The world: the code that really does what the chain allowed.

pub mod conversation;
pub mod fs;
pub mod http;
pub mod net;
pub mod runs;
pub mod secrets;
pub mod unpack;
pub mod words;
