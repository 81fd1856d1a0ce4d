//! What requests and downloads cost through the network door, and what they cost without it.
//!
//! `network serve PORT TLS_PORT FOLDER` is a server on the loopback: `/small` has 13 bytes, `/large/N` that many
//! mebibytes. It writes the certificate of its authority to `FOLDER/authority.pem` before it serves. `network ask
//! requests|together|download|connections URL COUNT` is a client, in a jail or not: it prints one JSON object with the
//! time of the whole in microseconds and of the median exchange. It trusts what `SSL_CERT_FILE` names.

use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper::{
    body::{Bytes, Frame, Incoming},
    service::service_fn,
    Request, Response, Uri,
};
use hyper_util::rt::TokioIo;
use std::{convert::Infallible, error::Error, process::ExitCode, sync::Arc, time::Instant};
use tokio::net::TcpStream;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Requests at the same time where several are.
const TOGETHER: usize = 8;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(Into::into).and_then(|runtime| match words[..] {
        ["serve", port, tls_port, folder] => runtime.block_on(serve(port, tls_port, folder)),
        ["ask", work, url, count] => runtime.block_on(ask(work, url, count)),
        _ => Err("unknown arguments\nhint: network serve PORT TLS_PORT FOLDER, or network ask WORK URL COUNT".into()),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(port: &str, tls_port: &str, folder: &str) -> Outcome<()> {
    let authority = tollgate::doors::network::authority::Authority::new("bench")?;
    std::fs::write(format!("{folder}/authority.pem"), authority.pem())?;
    let certificate = authority.certificate_for("api.test")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut settings = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(tollgate::doors::network::authority::OneHost(certificate)));
    settings.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(settings));
    let plain = tokio::net::TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    let secure = tokio::net::TcpListener::bind(format!("127.0.0.1:{tls_port}")).await?;
    loop {
        tokio::select! {
            accepted = plain.accept() => {
                let (stream, _) = accepted?;
                stream.set_nodelay(true)?;
                tokio::spawn(connection(TokioIo::new(stream)));
            }
            accepted = secure.accept() => {
                let (stream, _) = accepted?;
                stream.set_nodelay(true)?;
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        connection(TokioIo::new(stream)).await;
                    }
                });
            }
        }
    }
}

async fn connection(stream: impl hyper::rt::Read + hyper::rt::Write + Unpin) {
    let service = service_fn(|request: Request<Incoming>| async move {
        let path = request.uri().path().to_owned();
        let mebibytes: usize = path.strip_prefix("/large/").and_then(|count| count.parse().ok()).unwrap_or(0);
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        let pieces: Vec<Bytes> = match mebibytes {
            0 => vec![Bytes::from_static(b"hello, world\n")],
            _ => vec![piece; mebibytes],
        };
        let length: usize = pieces.iter().map(Bytes::len).sum();
        let frames =
            futures_util::stream::iter(pieces.into_iter().map(|piece| Ok::<_, Infallible>(Frame::data(piece))));
        let mut response = Response::new(StreamBody::new(frames));
        response.headers_mut().insert(hyper::header::CONTENT_LENGTH, length.into());
        Ok::<_, Infallible>(response)
    });
    // A client that goes away has what it wanted.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(stream, service).await;
}

type Body = Empty<Bytes>;

async fn ask(work: &str, url: &str, count: &str) -> Outcome<()> {
    let uri: Uri = url.parse()?;
    let count: usize = count.parse()?;
    let began;
    let mut times = Vec::with_capacity(count);
    let mut bytes = 0;
    match work {
        "requests" | "download" => {
            let mut line = Line::open(&uri).await?;
            line.get(&uri).await?;
            began = Instant::now();
            for _ in 0..count {
                let one = Instant::now();
                bytes += line.get(&uri).await?;
                times.push(one.elapsed().as_secs_f64() * 1e6);
            }
        }
        "together" => {
            let mut lines = Vec::new();
            for _ in 0..TOGETHER {
                let mut line = Line::open(&uri).await?;
                line.get(&uri).await?;
                lines.push(line);
            }
            began = Instant::now();
            let mut tasks = tokio::task::JoinSet::new();
            for mut line in lines {
                let uri = uri.clone();
                tasks.spawn(async move {
                    let mut times = Vec::new();
                    for _ in 0..count / TOGETHER {
                        let one = Instant::now();
                        line.get(&uri).await?;
                        times.push(one.elapsed().as_secs_f64() * 1e6);
                    }
                    Ok::<_, Box<dyn Error + Send + Sync>>(times)
                });
            }
            while let Some(done) = tasks.join_next().await {
                times.extend(done??);
            }
        }
        "connections" => {
            began = Instant::now();
            for _ in 0..count {
                let one = Instant::now();
                bytes += Line::open(&uri).await?.get(&uri).await?;
                times.push(one.elapsed().as_secs_f64() * 1e6);
            }
        }
        _ => return Err(format!("unknown work `{work}`").into()),
    }
    let whole = began.elapsed().as_secs_f64() * 1e6;
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    println!("{}", serde_json::json!({ "whole_us": whole, "median_us": median, "bytes": bytes }));
    Ok(())
}

/// One connection that is kept.
struct Line(hyper::client::conn::http1::SendRequest<Body>);

impl Line {
    async fn open(uri: &Uri) -> Outcome<Line> {
        let host = uri.host().ok_or("no host")?;
        let secure = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        if !secure {
            return Line::over(TokioIo::new(stream)).await;
        }
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let settings = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = rustls::pki_types::ServerName::try_from(host.to_owned())?;
        let stream = tokio_rustls::TlsConnector::from(Arc::new(settings)).connect(name, stream).await?;
        Line::over(TokioIo::new(stream)).await
    }

    async fn over(stream: impl hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static) -> Outcome<Line> {
        let (sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
        tokio::spawn(connection);
        Ok(Line(sender))
    }

    /// Asks once, and gives how many bytes came.
    async fn get(&mut self, uri: &Uri) -> Outcome<u64> {
        let authority = uri.authority().ok_or("no authority")?.as_str();
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let request = Request::get(path).header("host", authority).body(Body::new())?;
        self.0.ready().await?;
        let mut body = self.0.send_request(request).await?.into_body();
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            bytes += frame?.data_ref().map_or(0, |data| data.len() as u64);
        }
        Ok(bytes)
    }
}
