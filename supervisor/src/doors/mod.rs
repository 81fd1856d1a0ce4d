//! Ways in. A door turns what a jail or a client asks into effects, and decides nothing.

pub mod api;
pub mod content;
pub mod control;
pub mod http;
pub mod network;
pub mod openapi;
pub mod program;
pub mod published;
pub mod request;
pub mod revert;
pub mod workspace;

pub use crate::effect::base64;
