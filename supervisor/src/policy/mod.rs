//! policy

pub mod limits;
