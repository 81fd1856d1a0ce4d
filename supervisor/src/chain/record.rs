//! Record: writes down every effect that passes, with its answer.
//!
//! It forwards everything and changes nothing. What lies further in is what it sees: outside of faults it records
//! them, inside of them only what went on to the world. An effect that a handler further out refused never comes here;
//! in a replay that handler refuses it again.
//!
//! A recording that cannot be written any more is given up, and the run's end says so: it is never sealed, so nobody
//! takes it for whole.

use super::{
    recording::{Asked, End, Writer},
    BoxFuture, Handler, Next,
};
use crate::{
    chain::Answer,
    effect::{Digest, Effect, Kind},
};
use std::{
    io,
    sync::{Mutex, PoisonError},
};

const NAME: &str = "record";

/// The handler.
pub struct Record {
    writer: Mutex<Result<Writer, io::Error>>,
}

impl Record {
    /// Records into this.
    pub fn new(writer: Writer) -> Record {
        Record { writer: Mutex::new(Ok(writer)) }
    }

    fn note(&self, effect: &Effect, answer: &Answer) {
        // What a name means in a run is the run's own, and which kind of address is asked for first is chance.
        if effect.kind == Kind::NetResolve && answer.is_success() {
            return;
        }
        // Nothing that the program asks for: a replay has nobody outside who would connect.
        if effect.kind == Kind::NetAccept {
            return;
        }
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(open) = &mut *writer {
            if let Err(error) = open.entry(Asked::of(effect), answer) {
                tracing::error!(%error, "the recording is given up");
                *writer = Err(error);
            }
        }
    }

    /// Ends the recording, once, and gives its digest.
    ///
    /// # Errors
    /// What kept an entry or the end from being written.
    pub fn finish(&self, stdin: Option<&[u8]>, end: End) -> io::Result<Digest> {
        let over = Err(io::Error::other("the recording has ended already"));
        let writer = std::mem::replace(&mut *self.writer.lock().unwrap_or_else(PoisonError::into_inner), over);
        writer?.end(stdin, end)
    }
}

impl Handler for Record {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let answer = next.run(effect).await;
            self.note(effect, &answer);
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{
            faults::Faults,
            recording::{
                tests::{end, head, Bytes},
                Recording,
            },
            testing::{ask, wait, FakeWorld},
            Decision,
        },
        effect::{tests::sample, Kind},
    };
    use std::sync::Arc;

    fn recorder() -> (Arc<Record>, Bytes) {
        let sink = Bytes::default();
        let writer = Writer::begin(Box::new(sink.clone()), head(), Vec::new()).unwrap();
        (Arc::new(Record::new(writer)), sink)
    }

    fn log(sink: &Bytes) -> Vec<(Kind, Decision, bool)> {
        let recording = Recording::parse(&sink.0.lock().unwrap()).unwrap();
        recording.entries.iter().map(|entry| (entry.kind, entry.answer.decision, entry.answer.injected)).collect()
    }

    /// Answering handlers do not commute: these are the two logs.
    #[test]
    fn recording_outside_faults_holds_them_and_inside_only_what_reached_the_world() {
        for outside in [true, false] {
            let (record, sink) = recorder();
            let faults = Arc::new(Faults::new(vec!["fs/write:error=ENOSPC".parse().unwrap()]));
            let mut handlers: Vec<Arc<dyn Handler>> = vec![record.clone(), faults];
            if !outside {
                handlers.reverse();
            }
            for kind in [Kind::FsRead, Kind::FsWrite] {
                wait(ask(handlers.clone(), &sample(kind), &FakeWorld::default()));
            }
            record.finish(None, end()).unwrap();
            let read = (Kind::FsRead, Decision::Allowed, false);
            match outside {
                true => assert_eq!(log(&sink), [read, (Kind::FsWrite, Decision::Failed, true)]),
                false => assert_eq!(log(&sink), [read]),
            }
        }
    }

    #[test]
    fn a_recording_that_cannot_be_written_is_never_sealed() {
        struct Full(usize);
        impl io::Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 = self.0.checked_sub(bytes.len()).ok_or(io::Error::from_raw_os_error(libc::ENOSPC))?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let record = Arc::new(Record::new(Writer::begin(Box::new(Full(600)), head(), Vec::new()).unwrap()));
        let answer = wait(ask(vec![record.clone()], &sample(Kind::FsRead), &FakeWorld::default()));
        assert!(answer.is_success(), "the program does not pay for it");
        assert_eq!(record.finish(None, end()).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    }
}
