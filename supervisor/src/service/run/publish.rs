//! The published ports of a run: bound before its jail, served while its program runs.

use super::serving::Serving;
use crate::{
    chain::Chain,
    doors::published::{self, Ask, Bound, Dialler, Parts},
    effect::Subject,
    jail::launch::Shim,
    policy::published::Published,
};
use std::{io, sync::Arc};
use tollgate_shim::protocol::ToShim;

/// The ports, and what serves them once the program runs.
#[derive(Default)]
pub(super) struct PublishedPorts {
    bound: Option<Bound>,
    dialler: Arc<Dialler>,
    serving: Option<Serving>,
}

impl PublishedPorts {
    /// Binds the ports.
    ///
    /// # Errors
    /// The first that cannot be had, in one sentence.
    pub(super) fn bind(ports: &[Published]) -> Result<PublishedPorts, String> {
        let bound = if ports.is_empty() { None } else { Some(published::bind(ports)?) };
        Ok(PublishedPorts { bound, ..PublishedPorts::default() })
    }

    /// Where the jail's answers go.
    pub(super) fn dialler(&self) -> Arc<Dialler> {
        Arc::clone(&self.dialler)
    }

    /// Serves the ports from here on, if there are any.
    ///
    /// # Errors
    /// Where no thread is to be had.
    pub(super) fn open(&mut self, chain: &Arc<Chain>, subject: &Subject, shim: &Shim) -> io::Result<()> {
        let Some(bound) = self.bound.take() else { return Ok(()) };
        let speaker = shim.speaker()?;
        let ask: Ask = Arc::new(move |id, to| speaker.tell(&ToShim::Dial { id, address: to.ip(), port: to.port() }));
        let parts = Parts {
            chain: Arc::clone(chain),
            subject: subject.clone(),
            room: None,
            dialler: Arc::clone(&self.dialler),
            ask,
        };
        let serving = Serving::start("published", move |closing| async move {
            if let Err(error) = published::serve(bound, parts, closing).await {
                tracing::error!(%error, "the published ports cannot be served");
            }
        })?;
        self.serving = Some(serving);
        Ok(())
    }

    /// Ends what is under way. The program is gone.
    pub(super) fn close(self) {
        if let Some(serving) = self.serving {
            serving.close();
        }
    }
}
