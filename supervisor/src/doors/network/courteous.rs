//! A TLS connection that says when it ends: without that, the other side cannot tell an end from a cut (RFC 8446,
//! section 6.1).

use super::Line;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;

/// The connection, which takes its leave when it is dropped, unless it is to be seen as broken.
pub(super) struct Courteous {
    stream: TlsStream<TcpStream>,
    line: Arc<Line>,
}

impl Courteous {
    pub(super) fn new(stream: TlsStream<TcpStream>, line: Arc<Line>) -> Courteous {
        Courteous { stream, line }
    }

    /// The protocol that the handshake agreed on, if any (RFC 7301).
    pub(super) fn agreed(&self) -> Option<&[u8]> {
        self.stream.get_ref().1.alpn_protocol()
    }
}

impl Drop for Courteous {
    fn drop(&mut self) {
        if !self.line.is_reset() {
            // As far as it goes at once: a program that does not read need not be told.
            let _ = Pin::new(&mut self.stream).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        }
    }
}

impl AsyncRead for Courteous {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Courteous {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
