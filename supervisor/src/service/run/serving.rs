//! A door that is served on a thread of its own, from when it opens until the program is gone.

use std::{future::Future, io, pin::Pin, thread};
use tokio::sync::watch;

/// Is ready when the door is to close.
pub(super) type Closing = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The thread, and how it is told to end.
pub(super) struct Serving {
    close: watch::Sender<bool>,
    thread: thread::JoinHandle<()>,
}

impl Serving {
    /// Serves on a new thread, by a runtime of its own. Serving ends when what it is given is ready; a failure is said by
    /// whoever serves.
    ///
    /// # Errors
    /// Where no thread or runtime is to be had.
    pub(super) fn start<F>(name: &str, serve: impl FnOnce(Closing) -> F + Send + 'static) -> io::Result<Serving>
    where
        F: Future<Output = ()>,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (close, mut closed) = watch::channel(false);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let closing = Box::pin(async move {
                // The sender going away means the same.
                let _ = closed.wait_for(|closed| *closed).await;
            });
            runtime.block_on(serve(closing));
            // What still waits, as for the answer about a name, is nobody's any more.
            runtime.shutdown_background();
        })?;
        Ok(Serving { close, thread })
    }

    /// Ends what is under way. The program is gone.
    pub(super) fn close(self) {
        let _ = self.close.send(true);
        // A panic there has been reported already; the run goes on to its end.
        let _ = self.thread.join();
    }
}
