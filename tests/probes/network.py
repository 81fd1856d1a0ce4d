# What a program in a jail with a network tries: each attempt is one line of JSON, its name and what came of it.
import errno
import json
import os
import socket
import struct
import threading

socket.setdefaulttimeout(3)


def told(name, attempt):
    try:
        came = attempt()
    except OSError as error:
        came = errno.errorcode.get(error.errno, str(error))
    print(json.dumps([name, came]), flush=True)


def connect(host, port):
    with socket.create_connection((host, port)) as stream:
        return stream.makefile().read()


for shown, host, port in [
    ("93.184.216.34:8080", "93.184.216.34", 8080),
    ("[2001:db8::1]:443", "2001:db8::1", 443),
    ("198.18.0.7:9999", "198.18.0.7", 9999),
    ("8.8.8.8:53", "8.8.8.8", 53),
    ("10.1.2.3:22", "10.1.2.3", 22),
    ("169.254.169.254:80", "169.254.169.254", 80),
    ("127.0.0.1:5432", "127.0.0.1", 5432),
    ("[::1]:5432", "::1", 5432),
]:
    told("tcp " + shown, lambda: connect(host, port))


def own(at, bound, family):
    with socket.socket(family) as server:
        server.bind((bound, 0))
        server.listen()

        def serve():
            accepted, _ = server.accept()
            accepted.sendall(b"own")
            accepted.close()

        threading.Thread(target=serve, daemon=True).start()
        return connect(at, server.getsockname()[1])


for at, bound, family in [
    ("127.0.0.1", "127.0.0.1", socket.AF_INET),
    ("127.0.0.2", "127.0.0.2", socket.AF_INET),
    ("::1", "::1", socket.AF_INET6),
    ("::ffff:127.0.0.1", "127.0.0.1", socket.AF_INET),
    ("networktest", "127.0.0.1", socket.AF_INET),
    ("localhost", "127.0.0.1", socket.AF_INET),
    ("0.0.0.0", "0.0.0.0", socket.AF_INET),
]:
    told("own " + at, lambda: own(at, bound, family))
told("own nobody", lambda: connect("127.0.0.1", 7))
told("the listener", lambda: connect("127.0.0.1", 1))
told("the listener6", lambda: connect("::1", 1))


def own_datagram():
    with datagram() as server, datagram() as client:
        server.bind(("127.0.0.1", 0))
        client.sendto(b"own", server.getsockname())
        return server.recv(9).decode()


def datagram(family=socket.AF_INET):
    return socket.socket(family, socket.SOCK_DGRAM)


told("own udp 127.0.0.1", own_datagram)


def ask(server):
    with datagram() as client:
        client.sendto(server.encode(), (server, 53))
        return "answered by " + client.recvfrom(99)[1][0]


with open("/etc/resolv.conf") as settings:
    server = [line.split()[1] for line in settings if line.startswith("nameserver")][0]
told("dns resolv.conf", lambda: ask(server))
told("dns 8.8.8.8", lambda: ask("8.8.8.8"))


def send_connected(host):
    with datagram() as client:
        client.connect((host, 443))
        return client.send(b"x")


def own_address():
    with datagram() as client:
        client.connect(("192.0.2.4", 443))
        return client.getsockname()[0]


told("udp sendto", lambda: datagram().sendto(b"x", ("192.0.2.1", 443)))
told("udp sendmsg", lambda: datagram().sendmsg([b"x"], [], 0, ("192.0.2.2", 443)))
told("udp connected send", lambda: send_connected("192.0.2.3"))
told("udp sendto6", lambda: datagram(socket.AF_INET6).sendto(b"x", ("2001:db8::3", 443)))
told("udp own address", own_address)

# rtnetlink(7): struct nlmsghdr, then struct rtmsg or ifinfomsg; the answer is a struct nlmsgerr.
RTM_NEWLINK, RTM_NEWROUTE, RTM_DELROUTE = 16, 24, 25
REQUEST, ACK, CREATE = 1, 4, 0x400


def netlink(kind, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
        route.send(struct.pack("=IHHII", 16 + len(body), kind, REQUEST | ACK | CREATE, 1, 0) + body)
        error = struct.unpack("=i", route.recv(4096)[16:20])[0]
        return errno.errorcode.get(-error, "it took")


route = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 254, 4, 0, 6, 0)
default = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 255, 4, 254, 2, 0)
told("netlink add route", lambda: netlink(RTM_NEWROUTE, route))
told("netlink delete route", lambda: netlink(RTM_DELROUTE, default))
told("netlink loopback down", lambda: netlink(RTM_NEWLINK, struct.pack("=BBHiII", 0, 0, 0, 1, 0, 1)))
told("netlink netfilter", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).fileno())
told("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).fileno())
told("raw6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6).fileno())
told("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).fileno())
told("vsock", lambda: socket.socket(40, socket.SOCK_STREAM).fileno())
told("sctp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).fileno())
told("ping", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).fileno())


def bind(kind, address):
    with socket.socket(socket.AF_INET, kind) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return server.bind(address)


told("listener's port", lambda: bind(socket.SOCK_STREAM, ("0.0.0.0", 1)))
told("name server's port", lambda: bind(socket.SOCK_DGRAM, ("198.18.0.1", 53)))
told("setsockopt mark", lambda: socket.socket().setsockopt(socket.SOL_SOCKET, 36, 1))
told("transparent", lambda: socket.socket().setsockopt(socket.SOL_IP, 19, 1))
told("iptables", lambda: socket.socket().setsockopt(socket.SOL_IP, 64, bytes(84)))
