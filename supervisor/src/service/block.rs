//! Waiting in ordinary code for what is asynchronous.

use std::{future::Future, io};
use tokio::runtime::Builder;

/// Waits for something that needs neither files, sockets nor time of its runtime: a chain and what it reaches in
/// process. It costs microseconds, where a run's start counts them.
pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().build().expect("a runtime without any driver opens nothing");
    runtime.block_on(work)
}

/// Waits for something that uses sockets or time.
///
/// # Errors
/// When the machine gives no event loop.
pub fn block_on_io<T>(work: impl Future<Output = T>) -> io::Result<T> {
    Ok(Builder::new_current_thread().enable_all().build()?.block_on(work))
}
