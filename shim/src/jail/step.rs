//! Named steps: what failed, on which object, in which kernel call, and what to do about it.

use crate::protocol::StepFailed;
use std::{fmt::Display, io};

/// A kernel call that failed, before the step it belongs to is known.
#[derive(Debug)]
pub struct Failure {
    object: String,
    call: &'static str,
    error: io::Error,
    remedy: String,
}

/// Adds the call and its object to an error.
pub trait At<T> {
    /// Names the kernel call and what it was about.
    fn at(self, call: &'static str, object: impl Display) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, call: &'static str, object: impl Display) -> Result<T, Failure> {
        self.map_err(|error| Failure { object: object.to_string(), call, error: error.into(), remedy: String::new() })
    }
}

impl Failure {
    /// The error number, for a caller with another way to go.
    pub fn errno(&self) -> Option<i32> {
        self.error.raw_os_error()
    }

    /// The call and its object.
    pub fn call_and_object(&self) -> String {
        format!("{}, {}", self.call, self.object)
    }

    /// Says what to do about it.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Failure {
        self.remedy = remedy.into();
        self
    }

    /// In one line, for a layer that may be missing.
    pub fn summary(&self) -> String {
        format!("{}: {}: {}", self.object, self.call, self.error)
    }
}

/// Runs one step of building the jail and gives its name to what fails in it.
pub fn step<T>(name: &'static str, action: impl FnOnce() -> Result<T, Failure>) -> Result<T, StepFailed> {
    action().map_err(|failure| StepFailed {
        step: name.to_owned(),
        object: failure.object,
        call: failure.call.to_owned(),
        errno: failure.error.raw_os_error().unwrap_or(libc::EIO),
        remedy: failure.remedy,
    })
}
