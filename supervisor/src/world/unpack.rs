//! Content that comes compressed, unpacked as it comes.

use flate2::write::{MultiGzDecoder, ZlibDecoder};
use hyper::body::{Body, Bytes, Frame};
use std::{
    io::{self, Write as _},
    pin::Pin,
    task::{Context, Poll},
};

/// So much is unpacked at a time. Compressed bytes are at most about a thousand times as many unpacked, so what is held
/// stays below some mebibytes, whatever comes.
const PIECE: usize = 4 * 1024;

/// A coding of content (RFC 9110, section 8.4.1) that can be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// `gzip` and `x-gzip`.
    Gzip,
    /// `deflate`: the zlib format.
    Deflate,
}

impl Coding {
    /// The coding of this name.
    pub fn named(name: &str) -> Option<Coding> {
        match name.trim().to_ascii_lowercase().as_str() {
            "gzip" | "x-gzip" => Some(Coding::Gzip),
            "deflate" => Some(Coding::Deflate),
            _ => None,
        }
    }
}

enum Decoder {
    Gzip(MultiGzDecoder<Vec<u8>>),
    Deflate(ZlibDecoder<Vec<u8>>),
}

impl Decoder {
    fn unpack(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Decoder::Gzip(decoder) => {
                decoder.write_all(bytes)?;
                decoder.flush()?;
                Ok(std::mem::take(decoder.get_mut()))
            }
            Decoder::Deflate(decoder) => {
                decoder.write_all(bytes)?;
                decoder.flush()?;
                Ok(std::mem::take(decoder.get_mut()))
            }
        }
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Decoder::Gzip(decoder) => decoder.finish(),
            Decoder::Deflate(decoder) => decoder.finish(),
        }
    }
}

/// A body without its coding.
pub struct Unpacked<B> {
    inner: B,
    decoder: Option<Decoder>,
    /// What is still to be unpacked.
    waiting: Bytes,
    trailers: Option<Frame<Bytes>>,
}

impl<B> Unpacked<B> {
    /// This body, which has this coding.
    pub fn new(inner: B, coding: Coding) -> Unpacked<B> {
        let decoder = match coding {
            Coding::Gzip => Decoder::Gzip(MultiGzDecoder::new(Vec::new())),
            Coding::Deflate => Decoder::Deflate(ZlibDecoder::new(Vec::new())),
        };
        Unpacked { inner, decoder: Some(decoder), waiting: Bytes::new(), trailers: None }
    }
}

impl<B, E> Body for Unpacked<B>
where
    B: Body<Data = Bytes, Error = E> + Unpin,
    E: From<io::Error>,
{
    type Data = Bytes;
    type Error = E;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, E>>> {
        loop {
            if !self.waiting.is_empty() {
                let length = self.waiting.len().min(PIECE);
                let piece = self.waiting.split_to(length);
                let Some(decoder) = &mut self.decoder else { return Poll::Ready(None) };
                match decoder.unpack(&piece) {
                    Ok(bytes) if bytes.is_empty() => continue,
                    Ok(bytes) => return Poll::Ready(Some(Ok(Frame::data(bytes.into())))),
                    Err(error) => {
                        self.decoder = None;
                        return Poll::Ready(Some(Err(error.into())));
                    }
                }
            }
            if self.decoder.is_none() {
                return Poll::Ready(self.trailers.take().map(Ok));
            }
            match std::task::ready!(Pin::new(&mut self.inner).poll_frame(context)) {
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => self.waiting = bytes,
                    Err(other) => self.trailers = Some(other),
                },
                None => match self.decoder.take().map(Decoder::finish) {
                    Some(Ok(bytes)) if !bytes.is_empty() => return Poll::Ready(Some(Ok(Frame::data(bytes.into())))),
                    Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                    Some(Ok(_)) | None => {}
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{write::GzEncoder, write::ZlibEncoder, Compression};
    use http_body_util::{BodyExt as _, StreamBody};

    async fn unpacked(packed: &[u8], coding: Coding, piece: usize) -> io::Result<Vec<u8>> {
        let pieces: Vec<_> =
            packed.chunks(piece).map(|one| Ok::<_, io::Error>(Frame::data(Bytes::copy_from_slice(one)))).collect();
        let body = Unpacked::new(StreamBody::new(futures_util::stream::iter(pieces)), coding);
        Ok(body.collect().await?.to_bytes().to_vec())
    }

    #[tokio::test]
    async fn what_was_packed_comes_out_however_it_is_cut() {
        let text = b"a secret and much else ".repeat(2_000);
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(&text).unwrap();
        let gzip = gzip.finish().unwrap();
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(&text).unwrap();
        let zlib = zlib.finish().unwrap();
        for piece in [1, 7, 100_000] {
            assert_eq!(unpacked(&gzip, Coding::Gzip, piece).await.unwrap(), text);
            assert_eq!(unpacked(&zlib, Coding::Deflate, piece).await.unwrap(), text);
        }
    }

    #[tokio::test]
    async fn what_is_not_packed_or_breaks_off_is_an_error() {
        assert!(unpacked(b"plain text that is no gzip", Coding::Gzip, 5).await.is_err());
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(&b"x".repeat(100_000)).unwrap();
        let gzip = gzip.finish().unwrap();
        assert!(unpacked(&gzip[..gzip.len() / 2], Coding::Gzip, 100).await.is_err());
    }
}
